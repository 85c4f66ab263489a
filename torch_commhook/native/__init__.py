"""The native libraries: loading them, and typed functions for what they hold."""
