"""The bundle: compiled code, parameters and a manifest that describes and seals both."""
