"""What is wrong with the KL term of a run, from the log-probs of its rollouts."""
