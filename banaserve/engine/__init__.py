"""All that runs in an engine core or a worker except moves: options, connector, uses of vLLM.

Entries: ``engine_args.parse_vllm_argv`` for the options that engines start with,
``connector.connector.StoreConnector`` for KV, ``compat`` for vLLM itself.
"""
