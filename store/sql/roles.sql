-- What each role may do. {role} is its name, {schema} where the log is, {same} the role's name as a text.

-- name: role
-- A role that nobody logs in as, unless it is there already, with no rights in the log; both rights that all of them need.
-- Partitions need none: whoever goes through their table is asked for rights to that.
do $$
begin
  if not exists (select 1 from pg_roles where rolname = {same}) then
    create role {role} nologin;
  end if;
end
$$;
revoke all on all tables in schema {schema} from {role};
grant usage on schema {schema} to {role};
grant select on alembic_version to {role};

-- name: worker
-- A model server: it appends what its calls do, and looks up what they continue.
grant select, insert on rollout, call_intent, model_call, call_end, rollout_outcome, media_object, call_media to {role};

-- name: trainer
-- Whoever makes rows: it reads everything, and appends which rows it trained.
grant select on
  rollout, call_intent, model_call, call_end, rollout_outcome, trained_row, media_object, call_media, tally
to {role};
grant select on rollout_state, row_boundary, chain, row_token_count, declared_vs_found, drift to {role};
grant insert on trained_row to {role};

-- name: auditor
-- Whoever looks at how rollouts went: views only, in which there are neither tokens nor secrets.
grant select on rollout_state, row_boundary, chain, row_token_count, declared_vs_found, drift to {role};

-- name: new_views
-- A view that a later revision makes is for whoever reads the first one.
do $$
declare
  new record;
begin
  for new in
    select distinct reader.rolname as reader, wanted.relname as view
    from pg_class as known
    cross join lateral aclexplode(known.relacl) as given
    join pg_roles as reader on reader.oid = given.grantee
    join pg_class as wanted on wanted.relnamespace = known.relnamespace and wanted.relkind = 'v'
    where known.relnamespace = current_schema()::regnamespace
      and known.relname = 'rollout_state'
      and given.privilege_type = 'SELECT'
      and wanted.relowner = known.relowner
      and not has_table_privilege(given.grantee, wanted.oid, 'select')
  loop
    execute format('grant select on %I to %I', new.view, new.reader);
  end loop;
end
$$;
