"""Chapter 9: what the group does to the reward, ``1/|o|`` to a KL loss, and steps to a credit."""
