"""Where keys and values of past tokens lie: slots, their store, attention over them, memory."""
