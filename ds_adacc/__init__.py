"""Adaptive activation checkpointing for DeepSpeed: recompute, compress or retain, decided per tensor."""
