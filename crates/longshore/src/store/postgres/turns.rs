//! Turns: the line in which groups with waiting jobs wait to be claimed from.

/// Adds turns for the jobs that a statement inserted into `ready` (`$rows`: run_at, priority,
/// queue, grp). A turn is never in the past, so a new group comes after those that wait
/// already. Needs no lock and no unique index, so it never waits for another transaction.
macro_rules! add_turns {
    ($rows:literal) => {
        concat!(
            "
    added_turns as (
      insert into longshore.turns (at, priority, queue, grp)
      select greatest(n.run_at, longshore.clock()), n.priority, n.queue, n.grp
        from ",
            $rows,
            " n
       where n.grp is not null
       group by 1, 2, 3, 4)"
        )
    };
}
pub(super) use add_turns;

/// Adds a turn for each group of which a job that was not due (`$rows`) leaves `ready`. Its turn may be at the end
/// of time, where nobody would find that the group has no jobs left.
macro_rules! add_turns_of_removed {
    ($rows:literal) => {
        concat!(
            "
    turns_of_removed as (
      insert into longshore.turns (at, priority, queue, grp)
      select longshore.clock(), n.priority, n.queue, n.grp
        from ",
            $rows,
            " n
       where n.grp is not null
         and n.run_at > longshore.clock()
       group by 2, 3, 4)"
        )
    };
}
pub(super) use add_turns_of_removed;

/// Adds a turn for each group with a limit whose leases ended (`taken`), because another of its
/// jobs may start now.
macro_rules! add_turns_of_freed {
    () => {
        "
    freed_turns as (
      insert into longshore.turns (at, priority, queue, grp)
      select longshore.clock(), coalesce((
               select w.priority
                 from longshore.turns w
                where w.queue = t.queue
                  and w.grp = t.grp
                order by w.priority desc
                limit 1), max(t.priority)), t.queue, t.grp
        from taken t
       where t.gate is not null
       group by t.queue, t.grp)"
    };
}
pub(super) use add_turns_of_freed;
