"""Test on each platform what all platforms do alike."""
