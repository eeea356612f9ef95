"""Linear attention: feature maps over a running sum."""
