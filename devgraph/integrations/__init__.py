"""Integrations of existing engines and models; each needs the package of its engine."""
