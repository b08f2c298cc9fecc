"""Chapter 7: stale and mismatched samples, enumerated and trained."""
