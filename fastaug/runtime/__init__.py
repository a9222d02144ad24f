"""Process and machine: device, ranks, signals, watchdog, caches."""
