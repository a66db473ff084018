"""Experiments on models with shared and personal layers."""
