-- What the tally says of a table, on both databases. A tally that was changed by hand may name a sequence twice.

-- name: named
-- The runs of sequences that were given to its events; or, of them, those that left with a partition.
with line as (
  select
    low,
    high,
    max(high) over (order by low, high rows between unbounded preceding and 1 preceding) as before
  from tally
  where table_name = :table_name and dropped = :dropped
),
numbered as (
  select
    low,
    high,
    sum(case when low <= before + 1 then 0 else 1 end) over (order by low, high rows unbounded preceding) as run
  from line
)
select min(low) as low, max(high) as high
from numbered
group by run
order by low;

-- name: twice
-- The sequences that were given more than once.
with line as (
  select
    low,
    high,
    max(high) over (order by low, high rows between unbounded preceding and 1 preceding) as before
  from tally
  where table_name = :table_name and not dropped
)
select low, case when high < before then high else before end as high
from line
where low <= before
order by low;
