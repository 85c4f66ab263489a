"""The native libraries: loading them, and typed functions for their contents."""
