"""The orchestrator and everything that keeps replicas alive and requests moving."""
