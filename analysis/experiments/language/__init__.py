"""Pretrained models and text tasks for the population trainer; the extras ``lm``, ``smollm2``."""
