"""What makes a pipeline faster or smaller, attached to its modules from outside.

Off, each changes nothing; what a model or device cannot do is refused when the replica starts.
"""
