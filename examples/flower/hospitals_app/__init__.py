"""Hospitals train one model in Flower, and its server sees their sum alone."""
