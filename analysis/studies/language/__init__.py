"""What is measured of a pretrained model, beside its training."""
