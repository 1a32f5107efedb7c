"""KV cache events of replicas, as vLLM publishes them: their wire format, order and sockets.

On the event loop of a balancer. Entry: ``subscriber.KvEventSubscriber``.
"""
