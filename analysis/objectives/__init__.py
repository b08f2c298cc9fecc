"""Objectives: from rewards to advantages, and from log-probs and advantages to a loss."""
