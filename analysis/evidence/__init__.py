"""What several chapters decide claims with: policies, chains, recorded runs, figures."""
