"""Engines: their options, the KV connector, and all uses of vLLM.

In engine cores, workers and guests; the server's process uses the options, ``continuation`` and
``compat``. Entries: ``engine_args.parse_vllm_argv`` for the options that engines start with,
``connector.connector.StoreConnector`` for KV, ``compat`` for vLLM itself.
"""
