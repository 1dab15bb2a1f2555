"""What is done about things that fail: waits before another try, circuit breakers, and who keeps count."""
