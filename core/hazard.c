/* ReuseHistory and HazardOrder: what hazard.py says of them. Integers alone, so that both say the same. */
#include "core.h"

static const long long NEVER = 1LL << 60;

PyTypeObject *ReuseHistoryType, *HazardOrderType;

enum { USES = 1 << 14, MARKS = 1 << 17, LEARN_EVERY = 256, SAME_USE = 8, MARK_BYTES = 32, PRIOR_USES = 20, CLIMB = 8 };
enum { LONGEST_REST = 64 };
enum { ONE = 1 << 20, MOST_CHANCE = ONE / 20 * 19 };

/* A use of the pages of a node. `again`: when they were used next, by the use `next`; 0 where they were not yet. */
typedef struct {
    long long clock, again, pages, next;
    int turn, kind;
} Use;

struct ReuseHistory {
    PyObject_HEAD
    long long page_bytes, now, count, births, reused, missed, resident, reach, won, lost, trial, rest, rested;
    int by_recency;
    Use *uses;       /* USES of them, by number modulo USES */
    uint64_t *marks; /* MARKS of them: half a hash, and the low half of a use's number */
    long long rank[USE_KINDS][BUCKETS];
};

static int bucket_of(long long age)
{
    if (age < 16)
        return 0;
    int octave = 4;
    while (age >> (octave + 1))
        octave++;
    int bucket = 1 + (octave - 4) * 4 + (int)(age >> (octave - 2) & 3);
    return bucket < BUCKETS ? bucket : BUCKETS - 1;
}

static long long begin_of(int bucket)
{
    int octave = 4 + (bucket - 1) / 4;
    return bucket == 0 ? 0 : (1LL << octave) + ((long long)((bucket - 1) % 4) << (octave - 2));
}

/* NULL for a use that is forgotten, and for none. */
static Use *use_at(ReuseHistory *self, long long number)
{
    return number > 0 && number > self->count - USES ? self->uses + number % USES : NULL;
}

static long long open_use(ReuseHistory *self, long long pages, int turn, int kind)
{
    self->uses[++self->count % USES] = (Use){self->now, 0, pages, 0, turn, kind};
    return self->count;
}

static void rank_kind(ReuseHistory *self, int kind, const long long *chance)
{
    for (int from = 0; from < BUCKETS; from++) {
        long long left = ONE, hits = 0, spent = 0, best = 0;
        for (int at = from; at < BUCKETS - 1; at++) {
            long long gone = left * chance[at] >> 20;
            hits += gone;
            spent += (left - (gone >> 1)) * (begin_of(at + 1) - begin_of(at));
            left -= gone;
            long long gain = (hits << 32) / spent;
            best = gain > best ? gain : best;
        }
        self->rank[kind][from] = best;
    }
}

/* The age at which recency would evict a page. */
static long long reach_of(ReuseHistory *self)
{
    long long pages = 0, uses = self->count < USES ? self->count : USES;
    for (long long i = 0; i < uses && self->resident > 0; i++) {
        const Use *use = self->uses + (self->count - i) % USES;
        pages += use->again ? 0 : use->pages;
        if (pages > self->resident)
            return self->now - use->clock;
    }
    return NEVER;
}

/* Decides whether the order is that of recency until the next time of learning. */
static void judge(ReuseHistory *self)
{
    long long all = self->reused + self->missed, tried = self->now - self->trial;
    self->reach = reach_of(self);
    if (self->by_recency) {
        if (self->now >= self->rested && 11 * self->missed > 2 * all)
            self->by_recency = 0, self->won = self->lost = 0, self->trial = self->now;
    } else if (25 * self->missed < 2 * all) {
        self->by_recency = 1;
    } else if (tried >= self->reach && self->won < self->lost) {
        self->rest = self->rest < LONGEST_REST ? 2 * self->rest : LONGEST_REST;
        self->by_recency = 1, self->rested = self->now + 4 * self->rest * self->reach;
    } else if (tried >= 4 * self->reach) {
        self->rest = self->rest > 1 ? self->rest / 2 : 1;
        self->won -= self->won >> 1, self->lost -= self->lost >> 1, self->trial += 2 * self->reach;
    }
}

static void learn(ReuseHistory *self)
{
    static long long ended[USE_KINDS + 1][BUCKETS], open[USE_KINDS + 1][BUCKETS];
    memset(ended, 0, sizeof ended);
    memset(open, 0, sizeof open);
    long long pages = 0, uses = self->count < USES ? self->count : USES;
    for (long long i = 0; i < uses; i++) {
        const Use *use = self->uses + (self->count - i) % USES;
        int bucket = bucket_of((use->again ? use->again : self->now) - use->clock);
        long long(*rows)[BUCKETS] = use->again ? ended : open;
        rows[use->kind][bucket] += use->pages;
        rows[USE_KINDS][bucket] += use->pages;
        pages += use->pages;
    }
    long long prior = PRIOR_USES * (pages / (uses ? uses : 1)) + 1, all[BUCKETS], chance[BUCKETS];
    for (int kind = USE_KINDS; kind >= 0; kind--) {
        long long lived = 0;
        for (int at = BUCKETS - 1; at >= 0; at--) {
            lived += ended[kind][at] + open[kind][at];
            long long held = lived - (open[kind][at] >> 1);
            if (kind == USE_KINDS) {
                all[at] = held ? (ended[kind][at] << 20) / held : 0;
            } else {
                chance[at] = ((ended[kind][at] << 20) + prior * all[at]) / (held + prior);
                chance[at] = chance[at] < MOST_CHANCE ? chance[at] : MOST_CHANCE;
            }
        }
        if (kind < USE_KINDS)
            rank_kind(self, kind, chance);
    }
    judge(self);
    self->reused -= self->reused >> 3, self->missed -= self->missed >> 3;
}

/* A node was used now: that ends the use before, and begins another of its kind. */
static void note(ReuseHistory *self, Node *node)
{
    Use *use = use_at(self, node->use);
    long long pages = node->end - node->start;
    if (use != NULL && use->again && use_at(self, use->next) != NULL && use_at(self, use->next)->clock == self->now) {
        node->use = use->next; /* the end of a node that was cut in two came before */
        use_at(self, node->use)->pages += pages;
        return;
    }
    if (use != NULL && use->clock == self->now)
        return;
    if (use != NULL && !use->again && (node->locks || self->now - use->clock < SAME_USE)) {
        use->clock = self->now;
        return;
    }
    int turn = use == NULL ? 1 : use->turn, kind = use == NULL ? 0 : use->kind;
    long long number = open_use(self, pages, turn, kind);
    if (use != NULL && !use->again) {
        self->won += self->now - use->clock > self->reach ? pages : 0;
        use->again = self->now, use->next = number;
    }
    self->reused += pages;
    node->use = number;
}

/* The newest use that took up the pages of a use, of no more than so many after it. */
static long long latest(ReuseHistory *self, long long number)
{
    for (int i = 0; i < 64; i++) {
        Use *use = use_at(self, number);
        if (use == NULL || !use->next || use_at(self, use->next) == NULL)
            break;
        number = use->next;
    }
    return number;
}

/* Marks stand at every page up to 16, and at 8 to 15 pages of each octave after it. */
static long long mark_after(long long page)
{
    long long step = 1;
    while (page + 1 >= 16 * step)
        step *= 2;
    return (page / step + 1) * step;
}

static uint64_t hash_of(const char *bytes, long long page)
{
    uint64_t hash = (uint64_t)page * 0x9e3779b97f4a7c15u, word;
    for (int i = 0; i < MARK_BYTES; i += 8) {
        memcpy(&word, bytes + i, 8);
        hash = (hash ^ word) * 0xc2b2ae3d27d4eb4fu;
        hash ^= hash >> 29;
    }
    return hash;
}

/* A leaf that nobody has seen: asks what is remembered of its pages, and marks them as its own. */
static int be_born(ReuseHistory *self, Node *node)
{
    Py_ssize_t length;
    const char *tokens = row_data(&node->tokens, &length);
    Node *parent = parent_of(node);
    if (tokens == NULL || parent == NULL)
        return -1;
    long long known = node->start, before = 0, number = self->count + 1;
    for (long long page = mark_after(node->start); page <= node->end; page = mark_after(page)) {
        long long end = (page - node->start) * self->page_bytes;
        if (end < MARK_BYTES || end > length)
            continue;
        uint64_t hash = hash_of(tokens + end - MARK_BYTES, page), *mark = self->marks + (hash & (MARKS - 1));
        if (*mark >> 32 == hash >> 32 && *mark != 0) {
            long long found = self->count - (long long)(uint32_t)((uint32_t)self->count - (uint32_t)*mark);
            if (use_at(self, found) != NULL)
                known = page, before = found;
        }
        *mark = (hash >> 32 << 32) | (uint32_t)number;
    }
    before = before ? latest(self, before) : parent->use;
    Use *use = use_at(self, before);
    int turn = use == NULL ? 1 : use->turn < TURNS ? use->turn + 1 : TURNS;
    int kind = (turn - 1) * 2 + (4 * known > 3 * node->end);
    if (known > node->start) {
        self->missed += known - node->start;
        if (use != NULL && !use->again && self->now - use->clock >= SAME_USE) {
            self->lost += self->now - use->clock < self->reach ? known - node->start : 0;
            use->again = self->now, use->next = number;
        }
    }
    node->use = open_use(self, node->end - node->start, turn, kind);
    if (++self->births % LEARN_EVERY == 0)
        learn(self);
    return 0;
}

static long long clock_of(ReuseHistory *self, Node *node)
{
    Use *use = use_at(self, node->use);
    return use == NULL ? 0 : use->clock;
}

/* Behind all of its kind; before them where it was used before the first of them, as one that comes back is. */
static void enter_ring(HazardOrder *order, Node *node)
{
    ReuseHistory *history = order->history;
    Use *use = use_at(history, node->use);
    Link *link = link_of(node, order->slot), *ends = order->rings + (use == NULL ? 0 : use->kind);
    int first = ends->after != ends && clock_of(history, node_of(ends->after, order->slot)) >= clock_of(history, node) &&
                clock_of(history, node_of(ends->before, order->slot)) > clock_of(history, node);
    link_behind(first ? ends : ends->before, link);
}

int hazard_add(HazardOrder *order, Node *node)
{
    ReuseHistory *history = order->history;
    Link *link = link_of(node, order->slot);
    if (link == NULL)
        return PyErr_Format(PyExc_ValueError, "node %lld was not made for order %zd", node->id, order->slot), -1;
    if (link->after != NULL)
        return 0;
    history->now = node->used > history->now ? node->used : history->now;
    int is_new = node->use == 0 && is_some(node->parent);
    if (is_new && be_born(history, node) < 0)
        return -1;
    enter_ring(order, node);
    order->count++;
    Py_INCREF((PyObject *)node);
    Use *mine = is_new ? use_at(history, node->use) : NULL;
    for (Node *above = mine == NULL ? NULL : parent_of(node); above != NULL && is_some(above->parent);
         above = parent_of(above)) {
        Use *use = use_at(history, above->use);
        if (use == NULL || use->again || history->now - use->clock >= SAME_USE)
            break;
        use->kind = mine->kind;
        Link *theirs = link_of(above, order->slot);
        if (theirs != NULL && theirs->after != NULL)
            link_out(theirs), enter_ring(order, above);
    }
    return PyErr_Occurred() ? -1 : 0;
}

void hazard_discard(HazardOrder *order, Node *node)
{
    Link *link = link_of(node, order->slot);
    if (link != NULL && link->after != NULL) {
        link_out(link);
        order->count--;
        Py_DECREF((PyObject *)node);
    }
}

int hazard_contains(HazardOrder *order, Node *node)
{
    Link *link = link_of(node, order->slot);
    return link != NULL && link->after != NULL;
}

int hazard_touch(HazardOrder *order, PyObject *path)
{
    Py_ssize_t count = PyList_Size(path);
    for (Py_ssize_t i = 0; i < count; i++) {
        Node *node = as_node(PyList_GetItem(path, i));
        if (node == NULL)
            return -1;
        order->history->now = node->used > order->history->now ? node->used : order->history->now;
        note(order->history, node);
        if (hazard_contains(order, node))
            link_out(link_of(node, order->slot)), enter_ring(order, node);
    }
    return count < 0 ? -1 : 0;
}

int hazard_put_first(HazardOrder *order, Node *node)
{
    if (!hazard_contains(order, node))
        return hazard_add(order, node);
    Link *link = link_of(node, order->slot);
    link_out(link);
    enter_ring(order, node);
    return 0;
}

static int has_below(HazardOrder *order, Node *node)
{
    return order->slot == 0 ? node->device_children > 0 : node->children != NULL && PyDict_Size(node->children) > 0;
}

/* The longest unused of a kind, or the last used, is the one worth least: its rank rises with the age at first, and falls
 * in the end. */
Node *hazard_first(HazardOrder *order)
{
    ReuseHistory *history = order->history;
    Node *found = NULL;
    long long least = 0, when = 0;
    for (int kind = 0; kind < USE_KINDS; kind++) {
        Link *ends = order->rings + kind, *link = ends->after;
        if (link == ends)
            continue;
        Node *node = node_of(link, order->slot);
        long long clock = clock_of(history, node);
        long long rank = history->by_recency ? node->used : clock ? history->rank[kind][bucket_of(history->now - clock)] : 0;
        if (found == NULL || rank < least || (rank == least && clock < when))
            found = node, least = rank, when = clock;
        if (history->by_recency)
            continue;
        link = ends->before;
        for (int i = 0; i < CLIMB && link != ends && has_below(order, node_of(link, order->slot)); i++)
            link = link->before;
        if (link == ends || has_below(order, node_of(link, order->slot)))
            continue;
        node = node_of(link, order->slot), clock = clock_of(history, node);
        rank = clock ? history->rank[kind][bucket_of(history->now - clock)] : 0;
        if (rank < least)
            found = node, least = rank, when = clock;
    }
    return found;
}

/* Kind after kind, over the nodes of this moment. */
static PyObject *order_py_iter(HazardOrder *self)
{
    PyObject *nodes = PyList_New(0);
    int failed = nodes == NULL ? -1 : 0;
    for (int kind = 0; kind < USE_KINDS && failed == 0; kind++)
        failed = list_ring(nodes, self->rings + kind, self->slot);
    PyObject *each = failed < 0 ? NULL : PyObject_GetIter(nodes);
    Py_XDECREF(nodes);
    return each;
}

static Py_ssize_t order_py_length(HazardOrder *self) { return self->count < 0 ? 0 : self->count; }

static PyObject *order_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(names))
{
    PyObject *history;
    Py_ssize_t slot = 0;
    if (!PyArg_ParseTuple(args, "O!|n", ReuseHistoryType, &history, &slot))
        return NULL;
    HazardOrder *self = (HazardOrder *)PyType_GenericAlloc(type, 0);
    if (self != NULL) {
        self->slot = slot < 0 ? 0 : slot;
        self->history = (ReuseHistory *)Py_NewRef(history);
        for (int kind = 0; kind < USE_KINDS; kind++)
            self->rings[kind].before = self->rings[kind].after = self->rings + kind;
    }
    return (PyObject *)self;
}

static void order_dealloc(HazardOrder *self)
{
    for (int kind = 0; kind < USE_KINDS; kind++)
        for (Link *ends = self->rings + kind; ends->after != NULL && ends->after != ends;) {
            Node *node = node_of(ends->after, self->slot);
            link_out(ends->after);
            Py_DECREF((PyObject *)node);
        }
    Py_XDECREF((PyObject *)self->history);
    object_free((PyObject *)self);
}

static PyMemberDef order_members[] = {{"history", T_OBJECT, offsetof(HazardOrder, history), READONLY, NULL},
                                      {NULL, 0, 0, 0, NULL}};
static PyType_Slot order_slots[] = {{Py_tp_new, order_new},
                                    {Py_tp_dealloc, order_dealloc},
                                    {Py_tp_iter, order_py_iter},
                                    {Py_sq_contains, linked_contains},
                                    {Py_sq_length, order_py_length},
                                    {Py_tp_methods, linked_methods},
                                    {Py_tp_members, order_members},
                                    {0, NULL}};
PyType_Spec hazard_order_spec = {"kvmover._core.HazardOrder", sizeof(HazardOrder), 0, Py_TPFLAGS_DEFAULT, order_slots};

static PyObject *history_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(names))
{
    long long page_bytes;
    if (!PyArg_ParseTuple(args, "L", &page_bytes))
        return NULL;
    if (page_bytes < 1)
        return PyErr_Format(PyExc_ValueError, "a page of %lld bytes", page_bytes);
    ReuseHistory *self = (ReuseHistory *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->page_bytes = page_bytes, self->by_recency = self->rest = 1, self->reach = NEVER;
    self->uses = calloc(USES, sizeof *self->uses);
    self->marks = calloc(MARKS, sizeof *self->marks);
    if (self->uses == NULL || self->marks == NULL) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void history_dealloc(ReuseHistory *self)
{
    free(self->uses);
    free(self->marks);
    object_free((PyObject *)self);
}

static PyMemberDef history_members[] = {
    {"now", T_LONGLONG, offsetof(ReuseHistory, now), READONLY, NULL},
    {"count", T_LONGLONG, offsetof(ReuseHistory, count), READONLY, NULL},
    {"births", T_LONGLONG, offsetof(ReuseHistory, births), READONLY, NULL},
    {"reused", T_LONGLONG, offsetof(ReuseHistory, reused), READONLY, NULL},
    {"missed", T_LONGLONG, offsetof(ReuseHistory, missed), READONLY, NULL},
    {"resident", T_LONGLONG, offsetof(ReuseHistory, resident), 0, NULL},
    {"reach", T_LONGLONG, offsetof(ReuseHistory, reach), READONLY, NULL},
    {"won", T_LONGLONG, offsetof(ReuseHistory, won), READONLY, NULL},
    {"lost", T_LONGLONG, offsetof(ReuseHistory, lost), READONLY, NULL},
    {"rest", T_LONGLONG, offsetof(ReuseHistory, rest), READONLY, NULL},
    {"by_recency", T_INT, offsetof(ReuseHistory, by_recency), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyObject *history_ranks(ReuseHistory *self, void *Py_UNUSED(unused))
{
    PyObject *rows = PyList_New(USE_KINDS);
    for (int kind = 0; rows != NULL && kind < USE_KINDS; kind++) {
        PyObject *row = PyList_New(BUCKETS);
        if (row == NULL || PyList_SetItem(rows, kind, row) < 0)
            return Py_XDECREF(rows), NULL;
        for (int at = 0; at < BUCKETS; at++)
            if (PyList_SetItem(row, at, PyLong_FromLongLong(self->rank[kind][at])) < 0)
                return Py_XDECREF(rows), NULL;
    }
    return rows;
}

static PyGetSetDef history_getset[] = {{"ranks", (getter)history_ranks, NULL, NULL, NULL},
                                       {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot history_slots[] = {{Py_tp_new, history_new},
                                      {Py_tp_dealloc, history_dealloc},
                                      {Py_tp_members, history_members},
                                      {Py_tp_getset, history_getset},
                                      {0, NULL}};
PyType_Spec reuse_history_spec = {"kvmover._core.ReuseHistory", sizeof(ReuseHistory), 0, Py_TPFLAGS_DEFAULT,
                                  history_slots};
