"""What every GPU kernel asks of a device, found without one: memory traffic, operations, limits."""
