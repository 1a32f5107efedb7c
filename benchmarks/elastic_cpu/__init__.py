"""Two instances under the elastic policy beside two plain vLLM servers, on this machine's CPU."""
