"""What the integrations of engines share: graph memory, captured steps, counters."""
