-- The tally: which sequences were given to events, so that a deleted event is missed, the last one too.
-- A line is a run of sequences of one table, which the events that follow make longer; an event whose sequence does not
-- follow begins a new line. There is no unique key: an append to a log that somebody changed by hand goes on, and the
-- audit says which sequence was given twice.

create table tally (
  table_name text not null,
  low integer not null,
  high integer not null,
  dropped integer not null,
  constraint tally_run check (low > 0 and low <= high)
) strict;
create index tally_order on tally (table_name, low);

insert into tally (table_name, low, high, dropped)
select 'rollout', min(sequence), max(sequence), 0
from (select sequence, sequence - row_number() over (order by sequence) as run from rollout)
group by run
order by min(sequence);

insert into tally (table_name, low, high, dropped)
select 'media_object', min(sequence), max(sequence), 0
from (select sequence, sequence - row_number() over (order by sequence) as run from media_object)
group by run
order by min(sequence);

insert into tally (table_name, low, high, dropped)
select 'call_intent', min(sequence), max(sequence), 0
from (select sequence, sequence - row_number() over (order by sequence) as run from call_intent)
group by run
order by min(sequence);

insert into tally (table_name, low, high, dropped)
select 'call_end', min(sequence), max(sequence), 0
from (select sequence, sequence - row_number() over (order by sequence) as run from call_end)
group by run
order by min(sequence);

insert into tally (table_name, low, high, dropped)
select 'call_media', min(sequence), max(sequence), 0
from (select sequence, sequence - row_number() over (order by sequence) as run from call_media)
group by run
order by min(sequence);

insert into tally (table_name, low, high, dropped)
select 'model_call', min(sequence), max(sequence), 0
from (select sequence, sequence - row_number() over (order by sequence) as run from model_call)
group by run
order by min(sequence);

insert into tally (table_name, low, high, dropped)
select 'rollout_outcome', min(sequence), max(sequence), 0
from (select sequence, sequence - row_number() over (order by sequence) as run from rollout_outcome)
group by run
order by min(sequence);

insert into tally (table_name, low, high, dropped)
select 'trained_row', min(sequence), max(sequence), 0
from (select sequence, sequence - row_number() over (order by sequence) as run from trained_row)
group by run
order by min(sequence);

create trigger rollout_tallied after insert on rollout
begin
  update tally set high = new.sequence
  where rowid = (select rowid from tally where table_name = 'rollout' and dropped = 0 order by low desc limit 1)
    and high = new.sequence - 1;
  insert into tally (table_name, low, high, dropped)
  select 'rollout', new.sequence, new.sequence, 0
  where changes() = 0;
end;

create trigger media_object_tallied after insert on media_object
begin
  update tally set high = new.sequence
  where rowid = (select rowid from tally where table_name = 'media_object' and dropped = 0 order by low desc limit 1)
    and high = new.sequence - 1;
  insert into tally (table_name, low, high, dropped)
  select 'media_object', new.sequence, new.sequence, 0
  where changes() = 0;
end;

create trigger call_intent_tallied after insert on call_intent
begin
  update tally set high = new.sequence
  where rowid = (select rowid from tally where table_name = 'call_intent' and dropped = 0 order by low desc limit 1)
    and high = new.sequence - 1;
  insert into tally (table_name, low, high, dropped)
  select 'call_intent', new.sequence, new.sequence, 0
  where changes() = 0;
end;

create trigger call_end_tallied after insert on call_end
begin
  update tally set high = new.sequence
  where rowid = (select rowid from tally where table_name = 'call_end' and dropped = 0 order by low desc limit 1)
    and high = new.sequence - 1;
  insert into tally (table_name, low, high, dropped)
  select 'call_end', new.sequence, new.sequence, 0
  where changes() = 0;
end;

create trigger call_media_tallied after insert on call_media
begin
  update tally set high = new.sequence
  where rowid = (select rowid from tally where table_name = 'call_media' and dropped = 0 order by low desc limit 1)
    and high = new.sequence - 1;
  insert into tally (table_name, low, high, dropped)
  select 'call_media', new.sequence, new.sequence, 0
  where changes() = 0;
end;

create trigger model_call_tallied after insert on model_call
begin
  update tally set high = new.sequence
  where rowid = (select rowid from tally where table_name = 'model_call' and dropped = 0 order by low desc limit 1)
    and high = new.sequence - 1;
  insert into tally (table_name, low, high, dropped)
  select 'model_call', new.sequence, new.sequence, 0
  where changes() = 0;
end;

create trigger rollout_outcome_tallied after insert on rollout_outcome
begin
  update tally set high = new.sequence
  where rowid = (select rowid from tally where table_name = 'rollout_outcome' and dropped = 0 order by low desc limit 1)
    and high = new.sequence - 1;
  insert into tally (table_name, low, high, dropped)
  select 'rollout_outcome', new.sequence, new.sequence, 0
  where changes() = 0;
end;

create trigger trained_row_tallied after insert on trained_row
begin
  update tally set high = new.sequence
  where rowid = (select rowid from tally where table_name = 'trained_row' and dropped = 0 order by low desc limit 1)
    and high = new.sequence - 1;
  insert into tally (table_name, low, high, dropped)
  select 'trained_row', new.sequence, new.sequence, 0
  where changes() = 0;
end;

-- A run grows at its end by one; nothing else of the tally changes.
create trigger tally_no_update before update on tally
when new.table_name <> old.table_name or new.low <> old.low or new.high <> old.high + 1
  or new.dropped <> old.dropped or new.rowid <> old.rowid
begin
  select raise(abort, 'tally is append-only: what was given to events stays given');
end;

create trigger tally_no_delete before delete on tally
begin
  select raise(abort, 'tally is append-only: what was given to events stays given');
end;

create trigger tally_insert_once before insert on tally
begin
  select raise(abort, 'tally is append-only: what was given to events stays given')
  where exists (select 1 from tally where rowid = new.rowid);
end;
