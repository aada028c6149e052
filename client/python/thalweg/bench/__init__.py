"""`thalweg bench`: Thalweg beside its peers, alternating in the same run on the same links."""
