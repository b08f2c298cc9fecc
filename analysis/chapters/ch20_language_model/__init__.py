"""Chapter 20: do these findings hold on a language model?"""
