-- The tables of events and their guards, for PostgreSQL 17 or newer.
-- Guards: no UPDATE, DELETE or TRUNCATE on an event, enabled ALWAYS, for the owner and for a superuser whose
-- session_replication_role is replica. They hold in partitions too, also when one is named itself.

do $$
begin
  if current_setting('server_version_num')::int < 170000 then
    raise exception 'turnlog needs PostgreSQL 17 or newer, this server is %', current_setting('server_version')
      using hint = 'older ones have no identity columns in partitioned tables';
  end if;
end
$$;

create table rollout (
  sequence bigint generated always as identity,
  rollout_id text not null,
  group_id text,
  slot bigint,
  task text,
  harness text,
  metadata text not null,
  opened_at bigint not null,
  digest bytea not null,
  constraint rollout_pkey primary key (sequence),
  constraint rollout_id_key unique (rollout_id),
  constraint rollout_sequence check (sequence > 0),
  constraint rollout_digest check (length(digest) = 32),
  constraint rollout_rollout_id check (length(rollout_id) between 1 and 128)
);
create index rollout_group on rollout (group_id);

create table call_intent (
  sequence bigint generated always as identity,
  call_id uuid not null,
  rollout_id text not null,
  decision text not null,
  reason text not null,
  parent_id uuid,
  worker text not null,
  at bigint not null,
  digest bytea not null,
  constraint call_intent_pkey primary key (call_id),
  constraint call_intent_sequence check (sequence > 0),
  constraint call_intent_digest check (length(digest) = 32),
  constraint call_intent_decision check (decision in ('root', 'continuation')),
  constraint call_intent_parent check ((parent_id is null) = (decision = 'root'))
) partition by range (call_id);
create index call_intent_order on call_intent (sequence);
create index call_intent_rollout on call_intent (rollout_id, sequence);

create table model_call (
  sequence bigint generated always as identity,
  call_id uuid not null,
  rollout_id text not null,
  parent_id uuid,
  root_id uuid not null,
  depth bigint not null,
  decision text not null,
  reason text not null,
  candidates bigint not null,
  reasoning_policy text not null,
  summary_hash bytea not null,
  request_hash bytea not null,
  answer_key bytea not null,
  render_hash bytea not null,
  tools_digest bytea not null,
  hash_version bigint not null,
  reasoning_digest bytea,
  prev_len bigint not null,
  prompt_len bigint not null,
  sampled_len bigint not null,
  chain_hash bytea not null,
  policy_spans text not null,
  finish_reason text not null,
  dialect text not null,
  model text not null,
  response_id text,
  answer_item_ids text not null,
  choice bigint not null,
  media_count bigint not null,
  writer_id uuid not null,
  writer_seq bigint not null,
  started_at bigint not null,
  completed_at bigint not null,
  digest bytea not null,
  evidence text not null,
  sampling text not null,
  hints text not null,
  request_roles text not null,
  request_digests bytea not null,
  answer_roles text not null,
  answer_digests bytea not null,
  codec smallint not null,
  token_ids bytea not null,
  logprobs bytea not null,
  constraint model_call_pkey primary key (call_id),
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
  constraint model_call_items check (length(request_digests) % 32 = 0 and length(answer_digests) % 32 = 0)
) partition by range (call_id);
create index model_call_order on model_call (sequence);
create index model_call_rollout on model_call (rollout_id, sequence);
create index model_call_summary on model_call (rollout_id, summary_hash);
create index model_call_parent on model_call (parent_id);
create index model_call_root on model_call (root_id, depth);

create table call_end (
  sequence bigint generated always as identity,
  call_id uuid not null,
  rollout_id text not null,
  state text not null,
  reason text not null,
  at bigint not null,
  digest bytea not null,
  codec smallint not null,
  token_ids bytea not null,
  logprobs bytea not null,
  constraint call_end_pkey primary key (call_id),
  constraint call_end_sequence check (sequence > 0),
  constraint call_end_digest check (length(digest) = 32),
  constraint call_end_state check (state in ('failed', 'refused', 'abandoned', 'lost'))
) partition by range (call_id);
create index call_end_order on call_end (sequence);
create index call_end_rollout on call_end (rollout_id, sequence);

create table rollout_outcome (
  sequence bigint generated always as identity,
  outcome_id uuid not null,
  rollout_id text not null,
  reward double precision not null,
  status text not null,
  accepted text,
  output text,
  declared_rewrites text not null,
  at bigint not null,
  digest bytea not null,
  constraint rollout_outcome_pkey primary key (sequence),
  constraint rollout_outcome_id_key unique (outcome_id),
  constraint rollout_outcome_sequence check (sequence > 0),
  constraint rollout_outcome_digest check (length(digest) = 32)
);
create index rollout_outcome_rollout on rollout_outcome (rollout_id, sequence);

create table trained_row (
  sequence bigint generated always as identity,
  run text not null,
  step bigint not null,
  row_id text not null,
  rollout_id text not null,
  tip_call_id uuid not null,
  selection text not null,
  selection_version bigint not null,
  advantage double precision not null,
  trainer_policy_version bigint not null,
  at bigint not null,
  digest bytea not null,
  constraint trained_row_pkey primary key (sequence),
  constraint trained_row_id_key unique (run, step, row_id),
  constraint trained_row_sequence check (sequence > 0),
  constraint trained_row_digest check (length(digest) = 32)
);
create index trained_row_rollout on trained_row (rollout_id, sequence);

-- Token bytes are compressed by their writer.
alter table model_call
  alter column token_ids set storage external,
  alter column logprobs set storage external;
alter table call_end
  alter column token_ids set storage external,
  alter column logprobs set storage external;

create function refuse_change() returns trigger language plpgsql as $$
begin
  raise exception '% is append-only: events are never changed or deleted (% refused), append a new event',
    coalesce(pg_partition_root(tg_relid), tg_relid)::regclass, tg_op using errcode = 'integrity_constraint_violation';
end
$$;

create trigger rollout_no_change before update or delete on rollout
  for each row execute function refuse_change();
create trigger rollout_no_truncate before truncate on rollout
  for each statement execute function refuse_change();
alter table rollout enable always trigger rollout_no_change;
alter table rollout enable always trigger rollout_no_truncate;

create trigger call_intent_no_change before update or delete on call_intent
  for each row execute function refuse_change();
create trigger call_intent_no_truncate before truncate on call_intent
  for each statement execute function refuse_change();
alter table call_intent enable always trigger call_intent_no_change;
alter table call_intent enable always trigger call_intent_no_truncate;

create trigger model_call_no_change before update or delete on model_call
  for each row execute function refuse_change();
create trigger model_call_no_truncate before truncate on model_call
  for each statement execute function refuse_change();
alter table model_call enable always trigger model_call_no_change;
alter table model_call enable always trigger model_call_no_truncate;

create trigger call_end_no_change before update or delete on call_end
  for each row execute function refuse_change();
create trigger call_end_no_truncate before truncate on call_end
  for each statement execute function refuse_change();
alter table call_end enable always trigger call_end_no_change;
alter table call_end enable always trigger call_end_no_truncate;

create trigger rollout_outcome_no_change before update or delete on rollout_outcome
  for each row execute function refuse_change();
create trigger rollout_outcome_no_truncate before truncate on rollout_outcome
  for each statement execute function refuse_change();
alter table rollout_outcome enable always trigger rollout_outcome_no_change;
alter table rollout_outcome enable always trigger rollout_outcome_no_truncate;

create trigger trained_row_no_change before update or delete on trained_row
  for each row execute function refuse_change();
create trigger trained_row_no_truncate before truncate on trained_row
  for each statement execute function refuse_change();
alter table trained_row enable always trigger trained_row_no_change;
alter table trained_row enable always trigger trained_row_no_truncate;

-- A call ends once: completed or otherwise. Ends wait for the completions in flight, so that neither overlooks the other;
-- completions do not wait for one another.
create function refuse_second_end() returns trigger language plpgsql
set plan_cache_mode = force_custom_plan  -- a plan for any id would lock every partition, and hold up the making of new ones
as $$
declare
  ended uuid := new.call_id;  -- a field of NEW is not known when partitions are chosen: all would be locked
begin
  if tg_argv[0] = 'completed' then
    perform pg_advisory_xact_lock_shared(hashtext('turnlog'), hashtext('call_end'));
    if exists (select 1 from call_end where call_id = ended) then
      raise exception 'call % has already ended without an answer', ended
        using errcode = 'integrity_constraint_violation';
    end if;
  else
    perform pg_advisory_xact_lock(hashtext('turnlog'), hashtext('call_end'));
    if exists (select 1 from model_call where call_id = ended) then
      raise exception 'call % is already completed', ended
        using errcode = 'integrity_constraint_violation';
    end if;
  end if;
  return new;
end
$$;

create trigger model_call_not_ended before insert on model_call
  for each row execute function refuse_second_end('completed');
create trigger call_end_not_completed before insert on call_end
  for each row execute function refuse_second_end('ended');
alter table model_call enable always trigger model_call_not_ended;
alter table call_end enable always trigger call_end_not_completed;

-- Sequences are handed out before their events are committed, so a higher one may be seen before a lower one. Before a
-- transaction takes its first sequence of a table it announces the last one that was taken, by a shared lock that it holds
-- to its end: key 'tu' (29813) plus the table's number, then 48 bits of the sequence. Whoever reads the highest sequence
-- first and then the announcements knows what is settled: nothing at or below the lowest of them will appear later. Nobody
-- waits. A lock is taken once a transaction and table, for locks are limited.
create function announce_sequence() returns trigger language plpgsql security definer set search_path from current as $$
declare
  announced text := 'turnlog.announced_' || tg_argv[0];
  taken bigint;
begin
  if coalesce(current_setting(announced, true), '') = '' then
    execute format(
      'select case when is_called then last_value else 0 end from %s',
      pg_get_serial_sequence(coalesce(pg_partition_root(tg_relid), tg_relid)::regclass::text, 'sequence')
    ) into taken;
    perform pg_advisory_xact_lock_shared((29813 + tg_argv[0]::bigint) << 48 | taken);
    perform set_config(announced, taken::text, true);
  end if;
  return null;
end
$$;

create trigger model_call_announced before insert on model_call
  for each statement execute function announce_sequence(0);
alter table model_call enable always trigger model_call_announced;

create trigger rollout_outcome_announced before insert on rollout_outcome
  for each statement execute function announce_sequence(1);
alter table rollout_outcome enable always trigger rollout_outcome_announced;

create trigger rollout_announced before insert on rollout
  for each statement execute function announce_sequence(2);
alter table rollout enable always trigger rollout_announced;

create trigger trained_row_announced before insert on trained_row
  for each statement execute function announce_sequence(3);
alter table trained_row enable always trigger trained_row_announced;

create trigger call_intent_announced before insert on call_intent
  for each statement execute function announce_sequence(4);
alter table call_intent enable always trigger call_intent_announced;

create trigger call_end_announced before insert on call_end
  for each statement execute function announce_sequence(5);
alter table call_end enable always trigger call_end_announced;

-- A partition of a table of calls, for ids of low and above and below high; the default one when both are null. Made aside
-- and then attached, so that calls go on meanwhile. Row triggers come with it, statement triggers are its own.
create function make_partition(parent text, named text, low uuid, high uuid) returns void language plpgsql as $$
declare
  kind text := case parent when 'model_call' then '0' when 'call_intent' then '4' when 'call_end' then '5' end;
begin
  execute format('create table %I (like %I including constraints including storage)', named, parent);
  execute format(
    'alter table %I attach partition %I %s', parent, named,
    case when low is null then 'default' else format('for values from (%L) to (%L)', low, high) end
  );
  execute format(
    'create trigger %I before truncate on %I for each statement execute function refuse_change()',
    parent || '_no_truncate', named
  );
  execute format('alter table %I enable always trigger %I', named, parent || '_no_truncate');
  execute format(
    'create trigger %I before insert on %I for each statement execute function announce_sequence(%s)',
    parent || '_announced', named, kind
  );
  execute format('alter table %I enable always trigger %I', named, parent || '_announced');
end
$$;

create function default_partition(parent text) returns regclass language sql stable as $$
  select partdefid::regclass from pg_partitioned_table where partrelid = parent::regclass
$$;

-- What the default partition holds of a range of ids, and its lowest and highest ones.
create function default_holds(parent text, low uuid, high uuid, out events bigint, out lowest uuid, out highest uuid)
language plpgsql stable as $$
begin
  execute format(
    'select count(*),'
    ' (select call_id from %1$s where call_id >= $1 and call_id < $2 order by call_id limit 1),'
    ' (select call_id from %1$s where call_id >= $1 and call_id < $2 order by call_id desc limit 1)'
    ' from %1$s where call_id >= $1 and call_id < $2',
    default_partition(parent)
  ) into events, lowest, highest using low, high;
end
$$;

-- The default partition, which holds events of this range only, becomes the range's, and an empty one takes its place.
-- No event moves, so every snapshot sees them; but calls wait while it is read once.
create function adopt_default(parent text, named text, low uuid, high uuid) returns void language plpgsql as $$
declare
  adopted regclass := default_partition(parent);
begin
  execute format('alter table %I detach partition %s', parent, adopted);
  execute format('alter table %s rename to %I', adopted, named);
  execute format('alter table %I attach partition %I for values from (%L) to (%L)', parent, named, low, high);
  perform make_partition(parent, parent || '_default', null, null);
end
$$;

-- A partition goes, and its events with it: for its owner, once they are kept elsewhere.
create function drop_partition(parent text, named text) returns void language plpgsql as $$
begin
  execute format('alter table %I detach partition %I', parent, named);
  execute format('drop table %I', named);
end
$$;

select make_partition('model_call', 'model_call_default', null, null);
select make_partition('call_intent', 'call_intent_default', null, null);
select make_partition('call_end', 'call_end_default', null, null);
