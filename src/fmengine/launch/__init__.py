"""Which rank this process is, and starting local workers."""
