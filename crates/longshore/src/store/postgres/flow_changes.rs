//! The list of changes of flows: what the statements that end or remove members add to it, or delete.

/// Notes the end of members of flows in `$rows`: id, flow. `$succeeded` says how they ended. Sorted, so that
/// changes are in the same order on both engines.
macro_rules! note_ends {
    ($rows:literal, $succeeded:literal) => {
        concat!(
            "
    noted_ends as (
      insert into longshore.flow_changes (flow, job, succeeded, failure)
      select n.flow, n.id, ",
            $succeeded,
            ", not ",
            $succeeded,
            "
        from ",
            $rows,
            " n
       where n.flow is not null
       order by n.id)"
        )
    };
}
pub(super) use note_ends;

/// Deletes the links of members that are removed. Those that wait for them stay: they say how the parent ended.
macro_rules! delete_links {
    ($ids:literal) => {
        concat!(
            "
    deleted_links as (
      delete from longshore.links
       where child = any(array(",
            $ids,
            "))),"
        )
    };
}
pub(super) use delete_links;
