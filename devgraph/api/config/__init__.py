"""The mode configuration: sources, precedence, compatibility rules and clusters."""
