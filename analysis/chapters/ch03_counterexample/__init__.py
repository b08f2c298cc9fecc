"""Chapter 3: the published counterexample to k3, and where k3 beats k1."""
