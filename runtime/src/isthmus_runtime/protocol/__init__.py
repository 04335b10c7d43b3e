"""Wire records between router, prefill and decode. JSON over HTTP/1.1; token streams are NDJSON lines.

| call | from -> to | body -> answer |
|---|---|---|
| GET  /info              | router -> engine  | EngineInfo |
| POST /internal/generate | router -> decode  | GenerateCall -> reserved line (with an attempt), token lines |
| POST /internal/prefill  | router -> prefill | PrefillCall -> PrefillAnswer, or lines where the ticket is to follow |
| POST /internal/ticket   | router -> prefill | TicketCall -> {} : of a prompt that was begun without |
| POST /internal/commit   | router -> decode  | CommitCall -> {} : prefill has sent everything, or has failed |
| POST /internal/abort    | router -> engine  | AbortCall -> {} : idempotent, unknown ids are ignored |
| POST /internal/adapter  | router -> engine  | AdapterCall -> {} : load or unload one |
| GET  /internal/drained  | decode -> prefill | ?attempt= -> DrainAnswer : may a byte of this attempt still move? |
| GET  /internal/kv-events | router -> engine | KvEvents lines, the first a snapshot, without end |

A prefill call without a ticket is answered in lines: an empty chunk when the ticket may come, the first token unless it
is the last, and `sent_line` or a chunk with the error. Closing the connection of a generate or prefill call cancels it.
An attempt id is in every message. Peer addresses come only from the router in these records, never from a client.
"""
