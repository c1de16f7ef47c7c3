"""A request's sampling parameters as rows of a step. The sampling itself is the backend's."""
