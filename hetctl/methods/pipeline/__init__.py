"""HetPipe: pipelines of stages on virtual workers, their planning and simulation."""
