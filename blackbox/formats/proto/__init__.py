"""The messages of the formats that are not JSON; `make protos` writes the modules from the .proto files."""
