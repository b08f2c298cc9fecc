"""What training frameworks add to their loss as the KL term, and what it optimises: chapter 14."""
