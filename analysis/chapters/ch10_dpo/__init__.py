"""Chapter 10: DPO, the data it does not need, and the data that training does need."""
