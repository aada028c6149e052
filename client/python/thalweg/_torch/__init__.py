"""What is changed in torch's own classes, and what their loss scalers decide."""
