"""HTTP of a balancer: connections of clients and to replicas, byte for byte."""
