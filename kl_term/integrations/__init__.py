"""The KL term in other people's trainers: each module needs the trainer that it extends."""
