"""Training that goes on when ranks are lost, and lets new ones in."""
