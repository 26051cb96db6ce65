-- The tables of events and their guards, for SQLite 3.37 or newer.
-- Guards: no UPDATE and no DELETE on an event, and an INSERT that comes again changes nothing. The last needs a trigger of
-- its own: INSERT OR REPLACE and ON CONFLICT DO UPDATE would delete the old row without waking its delete trigger.
-- sequence is the rowid: given by the database, never used again.

create table rollout (
  sequence integer not null,
  rollout_id text not null,
  group_id text,
  slot integer,
  task text,
  harness text,
  metadata text not null,
  opened_at integer not null,
  digest blob not null,
  constraint rollout_pkey primary key (sequence),
  constraint rollout_id_key unique (rollout_id),
  constraint rollout_sequence check (sequence > 0),
  constraint rollout_digest check (length(digest) = 32),
  constraint rollout_rollout_id check (length(rollout_id) between 1 and 128)
) strict;
create index rollout_group on rollout (group_id);

create table call_intent (
  sequence integer not null,
  call_id blob not null,
  rollout_id text not null,
  decision text not null,
  reason text not null,
  parent_id blob,
  worker text not null,
  at integer not null,
  digest blob not null,
  constraint call_intent_pkey primary key (sequence),
  constraint call_intent_id_key unique (call_id),
  constraint call_intent_sequence check (sequence > 0),
  constraint call_intent_digest check (length(digest) = 32),
  constraint call_intent_decision check (decision in ('root', 'continuation')),
  constraint call_intent_parent check ((parent_id is null) = (decision = 'root')),
  constraint call_intent_ids check (length(call_id) = 16 and length(parent_id) = 16)
) strict;
create index call_intent_rollout on call_intent (rollout_id, sequence);

create table model_call (
  sequence integer not null,
  call_id blob not null,
  rollout_id text not null,
  parent_id blob,
  root_id blob not null,
  depth integer not null,
  decision text not null,
  reason text not null,
  candidates integer not null,
  reasoning_policy text not null,
  summary_hash blob not null,
  request_hash blob not null,
  answer_key blob not null,
  render_hash blob not null,
  tools_digest blob not null,
  hash_version integer not null,
  reasoning_digest blob,
  prev_len integer not null,
  prompt_len integer not null,
  sampled_len integer not null,
  chain_hash blob not null,
  policy_spans text not null,
  finish_reason text not null,
  dialect text not null,
  model text not null,
  response_id text,
  answer_item_ids text not null,
  choice integer not null,
  media_count integer not null,
  writer_id blob not null,
  writer_seq integer not null,
  started_at integer not null,
  completed_at integer not null,
  digest blob not null,
  evidence text not null,
  sampling text not null,
  hints text not null,
  request_roles text not null,
  request_digests blob not null,
  answer_roles text not null,
  answer_digests blob not null,
  codec integer not null,
  token_ids blob not null,
  logprobs blob not null,
  constraint model_call_pkey primary key (sequence),
  constraint model_call_id_key unique (call_id),
  constraint model_call_sequence check (sequence > 0),
  constraint model_call_digests check (
    length(digest) = 32 and length(summary_hash) = 32 and length(request_hash) = 32 and length(answer_key) = 32
    and length(render_hash) = 32 and length(tools_digest) = 32 and length(chain_hash) = 32
    and length(reasoning_digest) = 32
  ),
  constraint model_call_decision check (decision in ('root', 'continuation')),
  constraint model_call_parent check (
    (parent_id is null) = (decision = 'root') and (parent_id is null) = (depth = 0)
    and (parent_id is null) = (root_id = call_id) and (parent_id is null) = (prev_len = 0)
  ),
  constraint model_call_counts check (
    depth >= 0 and prev_len >= 0 and prompt_len >= prev_len and sampled_len >= 0 and writer_seq >= 0
  ),
  constraint model_call_arrays check (
    length(logprobs) = 4 * sampled_len
    and (codec <> 0 or length(token_ids) = 4 * (prompt_len - prev_len + sampled_len))
  ),
  constraint model_call_items check (length(request_digests) % 32 = 0 and length(answer_digests) % 32 = 0),
  constraint model_call_ids check (
    length(call_id) = 16 and length(parent_id) = 16 and length(root_id) = 16 and length(writer_id) = 16
  )
) strict;
create index model_call_rollout on model_call (rollout_id, sequence);
create index model_call_summary on model_call (rollout_id, summary_hash);
create index model_call_parent on model_call (parent_id);
create index model_call_root on model_call (root_id, depth);

create table call_end (
  sequence integer not null,
  call_id blob not null,
  rollout_id text not null,
  state text not null,
  reason text not null,
  at integer not null,
  digest blob not null,
  codec integer not null,
  token_ids blob not null,
  logprobs blob not null,
  constraint call_end_pkey primary key (sequence),
  constraint call_end_id_key unique (call_id),
  constraint call_end_sequence check (sequence > 0),
  constraint call_end_digest check (length(digest) = 32),
  constraint call_end_state check (state in ('failed', 'refused', 'abandoned', 'lost')),
  constraint call_end_ids check (length(call_id) = 16)
) strict;
create index call_end_rollout on call_end (rollout_id, sequence);

create table rollout_outcome (
  sequence integer not null,
  outcome_id blob not null,
  rollout_id text not null,
  reward real not null,
  status text not null,
  accepted text,
  output text,
  declared_rewrites text not null,
  at integer not null,
  digest blob not null,
  constraint rollout_outcome_pkey primary key (sequence),
  constraint rollout_outcome_id_key unique (outcome_id),
  constraint rollout_outcome_sequence check (sequence > 0),
  constraint rollout_outcome_digest check (length(digest) = 32),
  constraint rollout_outcome_ids check (length(outcome_id) = 16)
) strict;
create index rollout_outcome_rollout on rollout_outcome (rollout_id, sequence);

create table trained_row (
  sequence integer not null,
  run text not null,
  step integer not null,
  row_id text not null,
  rollout_id text not null,
  tip_call_id blob not null,
  selection text not null,
  selection_version integer not null,
  advantage real not null,
  trainer_policy_version integer not null,
  at integer not null,
  digest blob not null,
  constraint trained_row_pkey primary key (sequence),
  constraint trained_row_id_key unique (run, step, row_id),
  constraint trained_row_sequence check (sequence > 0),
  constraint trained_row_digest check (length(digest) = 32),
  constraint trained_row_ids check (length(tip_call_id) = 16)
) strict;
create index trained_row_rollout on trained_row (rollout_id, sequence);


create trigger rollout_no_update before update on rollout
begin
  select raise(abort, 'rollout is append-only: events are never changed, append a new event');
end;

create trigger rollout_no_delete before delete on rollout
begin
  select raise(abort, 'rollout is append-only: events are never deleted');
end;

create trigger rollout_insert_once before insert on rollout
begin
  select raise(ignore)
  where exists (select 1 from rollout where rollout_id = new.rollout_id and digest = new.digest);
  select raise(abort, 'rollout: this id is already in the log with other content, and events are never changed')
  where exists (select 1 from rollout where rollout_id = new.rollout_id);
  select raise(abort, 'rollout: this sequence is already used')
  where exists (select 1 from rollout where sequence = new.sequence);
end;

create trigger call_intent_no_update before update on call_intent
begin
  select raise(abort, 'call_intent is append-only: events are never changed, append a new event');
end;

create trigger call_intent_no_delete before delete on call_intent
begin
  select raise(abort, 'call_intent is append-only: events are never deleted');
end;

create trigger call_intent_insert_once before insert on call_intent
begin
  select raise(ignore)
  where exists (select 1 from call_intent where call_id = new.call_id and digest = new.digest);
  select raise(abort, 'call_intent: this id is already in the log with other content, and events are never changed')
  where exists (select 1 from call_intent where call_id = new.call_id);
  select raise(abort, 'call_intent: this sequence is already used')
  where exists (select 1 from call_intent where sequence = new.sequence);
end;

create trigger model_call_no_update before update on model_call
begin
  select raise(abort, 'model_call is append-only: events are never changed, append a new event');
end;

create trigger model_call_no_delete before delete on model_call
begin
  select raise(abort, 'model_call is append-only: events are never deleted');
end;

create trigger model_call_insert_once before insert on model_call
begin
  select raise(ignore)
  where exists (select 1 from model_call where call_id = new.call_id and digest = new.digest);
  select raise(abort, 'model_call: this id is already in the log with other content, and events are never changed')
  where exists (select 1 from model_call where call_id = new.call_id);
  select raise(abort, 'model_call: this sequence is already used')
  where exists (select 1 from model_call where sequence = new.sequence);
end;

create trigger call_end_no_update before update on call_end
begin
  select raise(abort, 'call_end is append-only: events are never changed, append a new event');
end;

create trigger call_end_no_delete before delete on call_end
begin
  select raise(abort, 'call_end is append-only: events are never deleted');
end;

create trigger call_end_insert_once before insert on call_end
begin
  select raise(ignore)
  where exists (select 1 from call_end where call_id = new.call_id and digest = new.digest);
  select raise(abort, 'call_end: this id is already in the log with other content, and events are never changed')
  where exists (select 1 from call_end where call_id = new.call_id);
  select raise(abort, 'call_end: this sequence is already used')
  where exists (select 1 from call_end where sequence = new.sequence);
end;

create trigger rollout_outcome_no_update before update on rollout_outcome
begin
  select raise(abort, 'rollout_outcome is append-only: events are never changed, append a new event');
end;

create trigger rollout_outcome_no_delete before delete on rollout_outcome
begin
  select raise(abort, 'rollout_outcome is append-only: events are never deleted');
end;

create trigger rollout_outcome_insert_once before insert on rollout_outcome
begin
  select raise(ignore)
  where exists (select 1 from rollout_outcome where outcome_id = new.outcome_id and digest = new.digest);
  select raise(abort, 'rollout_outcome: this id is already in the log with other content, and events are never changed')
  where exists (select 1 from rollout_outcome where outcome_id = new.outcome_id);
  select raise(abort, 'rollout_outcome: this sequence is already used')
  where exists (select 1 from rollout_outcome where sequence = new.sequence);
end;

create trigger trained_row_no_update before update on trained_row
begin
  select raise(abort, 'trained_row is append-only: events are never changed, append a new event');
end;

create trigger trained_row_no_delete before delete on trained_row
begin
  select raise(abort, 'trained_row is append-only: events are never deleted');
end;

create trigger trained_row_insert_once before insert on trained_row
begin
  select raise(ignore)
  where exists (select 1 from trained_row where run = new.run and step = new.step and row_id = new.row_id and digest = new.digest);
  select raise(abort, 'trained_row: this id is already in the log with other content, and events are never changed')
  where exists (select 1 from trained_row where run = new.run and step = new.step and row_id = new.row_id);
  select raise(abort, 'trained_row: this sequence is already used')
  where exists (select 1 from trained_row where sequence = new.sequence);
end;

-- A call ends once: completed or otherwise.
create trigger model_call_not_ended before insert on model_call
begin
  select raise(abort, 'model_call: this call has already ended without an answer')
  where exists (select 1 from call_end where call_id = new.call_id);
end;

create trigger call_end_not_completed before insert on call_end
begin
  select raise(abort, 'call_end: this call is already completed')
  where exists (select 1 from model_call where call_id = new.call_id);
end;
