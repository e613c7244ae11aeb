/* The parts of the C core and what they share: the same columns that columns.py defines, as C structures; and beside them
 * what a replay remembers.
 *
 * Everything that Python can see of them has the names and meanings that it has there. A column without a value is
 * NULL, or None where Python has set it. Nodes are not seen by Python's cyclic collector: the Forest cuts their links.
 */
#ifndef KVMOVER_CORE_H
#define KVMOVER_CORE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Which of a node's links an order takes: the device's and the host's are 0 and 1, of component i 3 + 2i and 4 + 2i. */
enum { ID_BYTES = 4, HASH_BYTES = 32, DOUBLES = 2, HELD = 3 };

/* A node's place in one order. Both are NULL where it is in none. */
typedef struct Link {
    struct Link *before, *after;
} Link;

/* Bytes [at, at + length) of a bytes object, or all of it where `length` is -1. A leaf takes its tokens as a part of the
 * key that they came in, which saves the copy; where they are too small a part, they are copied. See `row_cut`.
 */
typedef struct {
    PyObject *bytes;
    Py_ssize_t at, length;
} Row;

typedef struct {
    PyObject_VAR_HEAD
    long long id, start, end, locks, host_locks, device_children, hits, used, created, backing, loading, use;
    Row tokens;
    PyObject *parent, *children, *pages, *host, *priority, *hashes, *held, *namespace;
    Link links[1]; /* as many as the tree has orders: ob_size */
} Node;

typedef struct {
    PyObject_HEAD
    PyObject *pages, *host;
    long long locks, host_locks, busy;
} ComponentPages;

typedef struct {
    PyObject_HEAD
    Link ends; /* its `after` goes first */
    Py_ssize_t slot, count;
} Recency;

/* hazard.c: a history is shared by the orders of a tree. */
enum { TURNS = 5, USE_KINDS = 2 * TURNS, BUCKETS = 53 };
typedef struct ReuseHistory ReuseHistory;

typedef struct {
    PyObject_HEAD
    ReuseHistory *history;
    Link rings[USE_KINDS]; /* by kind, each as of a Recency */
    Py_ssize_t slot, count;
} HazardOrder;

typedef struct {
    PyObject_HEAD
    PyObject *order;
    long long evictable, protected_;
} EvictableSet;

typedef struct {
    PyObject_HEAD
    long long page_bytes, clock, next_id;
    PyObject *nodes, *roots, *trimmed;
    PyObject *device, *host, *doubles, *held_device, *held_host, *per_page, *reach_pages, *ranks, *journal;
    char hosted, writes_back;
} Columns;

extern PyTypeObject *ReuseHistoryType, *HazardOrderType;
extern PyType_Spec reuse_history_spec, hazard_order_spec;
extern PyTypeObject *NodeType, *ComponentPagesType, *RecencyType, *EvictableSetType, *ColumnsType, *PagesInUseType, *ChildrenType;
extern PyType_Spec node_spec, component_pages_spec, recency_spec, evictable_set_spec, columns_spec, pages_in_use_spec, children_spec;
/* index_table.c */
extern PyTypeObject *PageTableType;
extern PyType_Spec page_table_spec;
/* ideal.c, simulated.c: what a replay remembers beside the tree. */
extern PyTypeObject *IdealType, *SimulatedStorageType;
extern PyType_Spec ideal_spec, simulated_storage_spec;

static inline int is_some(PyObject *value) { return value != NULL && value != Py_None; }

/* The bytes of a column; -1 with a TypeError where it has none. */
static inline int row_of(PyObject *column, char **row, Py_ssize_t *length)
{
    return PyBytes_AsStringAndSize(column == NULL ? Py_None : column, row, length);
}

/* Puts a new reference in a column and drops what was there. */
static inline void put(PyObject **column, PyObject *value)
{
    PyObject *before = *column;
    *column = value;
    Py_XDECREF(before);
}

/* node.c: NULL with a TypeError for anything else. `node_path`: a list, deepest first, without the root. */
Node *as_node(PyObject *value);
PyObject *node_path(Node *node, PyObject *unused);
Node *node_new(Py_ssize_t orders, long long id, PyObject *parent, PyObject *tokens, long long start, long long end);
PyObject *node_children(Node *node, void *unused);
char *row_data(const Row *row, Py_ssize_t *length);
int row_cut(Row *row, Py_ssize_t from, Py_ssize_t length);
void object_free(PyObject *self);

/* children.c: `children` are a node's, NULL where it has had none. `get` is borrowed, NULL without an error for none.
 * `new`: those of a dict, or none. */
PyObject *children_new(PyObject *dict);
PyObject *children_get(PyObject *children, PyObject *name);
int children_put(PyObject *children, PyObject *name, PyObject *child);
int children_drop(PyObject *children, PyObject *name);
Py_ssize_t children_count(PyObject *children);
PyObject *children_values(PyObject *children);

/* recency.c: of an order that is a Recency, or any other that has the methods. -1 with an error. */
int order_add(PyObject *order, Node *node);
int order_discard(PyObject *order, Node *node);
int order_contains(PyObject *order, Node *node);
int order_touch(PyObject *order, PyObject *path);
void recency_touch(Recency *order, Node *node);
void link_behind(Link *before, Link *link);
void link_out(Link *link);
Link *link_of(Node *node, Py_ssize_t slot);
Node *node_of(Link *link, Py_ssize_t slot);
int list_ring(PyObject *nodes, Link *ends, Py_ssize_t slot);
Node *recency_first(Recency *order);

/* Of an order that is a Recency or a HazardOrder: one whose links lie in the nodes. Python calls the methods of both. */
int is_linked(PyObject *order);
Node *linked_first(PyObject *order);
int linked_put_first(PyObject *order, Node *node);
int linked_contains(PyObject *order, PyObject *node);
extern PyMethodDef linked_methods[];

/* hazard.c */
int hazard_add(HazardOrder *order, Node *node);
void hazard_discard(HazardOrder *order, Node *node);
int hazard_contains(HazardOrder *order, Node *node);
int hazard_touch(HazardOrder *order, PyObject *path);
int hazard_put_first(HazardOrder *order, Node *node);
Node *hazard_first(HazardOrder *order);

/* columns.c */
EvictableSet *as_set(PyObject *value);
int note_stored(Columns *self, Node *node, int tier);
int note_removed(Columns *self, Node *node, long long first, int tier);
int columns_whole(Columns *self);
Node *columns_make(Columns *self, long long id, PyObject *parent, PyObject *tokens, long long start, long long end);

/* A descent: its last whole node, or the root; the node left midway, or NULL, and the pages that match in it; the pages
 * that match in all; the number of whole nodes. Nodes are borrowed.
 */
typedef struct {
    Node *last, *inside;
    Py_ssize_t inner, nodes;
    long long end;
} Reached;

/* steps.c, split.c, accounts.c: steps of Columns, which others are made of. -1, or NULL, with an error. `trim` copies the
 * ids of what it cuts off to `to`. */
Node *parent_of(Node *node);
int walk_down(Columns *self, Node *root, PyObject *key, PyObject *until, Reached *found);
Node *walk_asked(Columns *self, PyObject *const *args, Py_ssize_t count, Reached *found); /* from the root it returns */
int enter(PyObject *nodes, Node *node);
int strike(PyObject *nodes, Node *node);
int trim(Columns *self, Node *node, long long pages, char *to);
int touch_up(Columns *self, Node *node); /* marks it and all above it as used, deepest first: find.c */
/* Takes an unlocked leaf of the device out, whose components hold no ids any more; its own go to `to`. */
int uproot_leaf(Columns *self, EvictableSet *device, Node *node, char *to);
int forget_root(Columns *self, Node *root);
Node *split_node(Columns *self, Node *node, long long pages, long long id);
int weigh(Columns *self, Node *node, long long sign);
int settle(Columns *self, Node *node);
ComponentPages *held_of(Node *node, Py_ssize_t i);
Py_ssize_t held_count(Node *node);

/* held.c. `usable_end`: at `*end` a path of so many nodes ends, the last of them `node`; then its last usable one does.
 * `held_at`: for each component the ids needed at page `end`, the last of the path that `node` has, as a tuple. `touch_held`:
 * marks what the end of `node` needs as used. */
Py_ssize_t component_count(Columns *self);
long long reach_pages_of(Columns *self, Py_ssize_t i);
long long rank_of(Columns *self, Py_ssize_t i);
int is_per_page(Columns *self, Py_ssize_t i);
int usable_end(Columns *self, Node *node, Py_ssize_t nodes, long long *end);
PyObject *held_at(Columns *self, Node *node, long long end);
int touch_held(Columns *self, Node *node);

/* pages_in_use.c: 1 where all `ids` are in use from here on, 0 where one was already, -1 with an error. `release_ids`: of
 * ids just claimed. */
int claim_ids(PyObject *in_use, PyObject *ids);
int release_ids(PyObject *in_use, PyObject *ids);

/* And those that Python calls. */
PyObject *columns_descend(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_gather(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_touch(Columns *self, PyObject *path);
PyObject *columns_find(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_insert(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_lock(Columns *self, PyObject *node);
PyObject *columns_unlock(Columns *self, PyObject *node);
PyObject *columns_front(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_split(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_grow(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_evict(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_trim(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_forget_root(Columns *self, PyObject *root);
PyObject *columns_weigh(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_settle(Columns *self, PyObject *node);
PyObject *columns_first_held(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_shift(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_evict_nodes(Columns *self, PyObject *const *args, Py_ssize_t count);

/* tiers.c */
PyObject *columns_evict_device(Columns *self, PyObject *const *args, Py_ssize_t count);
PyObject *columns_evict_host(Columns *self, PyObject *pages);

/* words.c, sha256.c, packed_rows.c, id_runs.c, simulated.c: functions of the module. */
int words_init(void);
int is_row_of_words(const Py_buffer *view); /* of 32 or 64 bits */
PyObject *words(PyObject *module, PyObject *tokens);
PyObject *multiples(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *chain(PyObject *module, PyObject *const *args, Py_ssize_t count);
int has_sha_instructions(void);
PyObject *id_runs(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pack_words(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pack_hashes(PyObject *module, PyObject *hashes);

/* Numbers of 64 bits in a row, of an object that has a buffer. lower.c: -1 with an error; else release the view. */
typedef struct {
    Py_buffer view;
    int64_t *numbers;
    Py_ssize_t count;
} Column;
int column_of(PyObject *of, int flags, Column *column);

/* gather.c, lower.c, runs.c, rows.c, digest.c, xxh3.c, vectors.c: functions of the module. */
PyObject *copy_rows(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *digest_rows(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *cell_digests(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *gather(PyObject *module, PyObject *runs);
PyObject *unit_offsets(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *descriptors(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *least_and_most(PyObject *module, PyObject *table);
PyObject *run_count(PyObject *module, PyObject *table);
PyObject *short_strides(PyObject *module, PyObject *table);
PyObject *runs_fit(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *vectors(PyObject *module, PyObject *unused);

#endif
