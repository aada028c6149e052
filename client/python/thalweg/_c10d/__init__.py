"""The process groups of the back end "thalweg" of torch.distributed."""
