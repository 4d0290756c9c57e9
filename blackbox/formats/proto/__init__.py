"""The messages of the contracts that are not JSON; `make protos` writes the modules from the .proto files."""
