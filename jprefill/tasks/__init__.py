"""What people ask, turned into token requests and back into typed answers."""
