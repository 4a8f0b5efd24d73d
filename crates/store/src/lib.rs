//! The ClusterStore port, its embedded adapter, its HTTP face and its client.
