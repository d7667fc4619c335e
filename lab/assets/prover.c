/* The program inside a lab guest. It keeps three proofs that nothing was lost:
 *
 *   memory  every page of a region carries a pattern made from its index and generation; a page is
 *           checked before it is written again, and all of them on request
 *   disk    numbered records with a checksum, each flushed before the next
 *   output  each number is sent to the observer only after its record is on the disk
 *
 * It also serves a small key-value store. From its answers, an observer outside the guest can decide
 * whether a single copy executed one operation after the other (lab/history/linearizability.py).
 *
 * Guests can also chat: each sends numbered messages to the others and keeps, in a page that can be
 * found in a capture of its memory, what it has sent and received (lab/guest_chat.py reads it).
 *
 * Settings come from the environment (the kernel passes key=value words of its command line to
 * init). A template (lab/guest_templates.py) is saved while it waits for the settings of the guest
 * that will start from it. lab/observer/messages.py describes the messages; both ends must agree.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/io.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 512, STRIDE = 8, PAGE = 4096, SECTOR = 512, BLOCK = 128 * SECTOR };
enum { NUMBER = 1, PING = 2, PONG = 3, VERIFY = 4, VERIFIED = 5 };
#define MESSAGE_MAGIC 0x31504b434d56ULL /* "VMCKP1" */
#define RECORD_MAGIC 0x31434552434d56ULL /* "VMCREC1" */

struct message {
    uint64_t magic, kind, token, run, number, clock_ns, pages_written, memory_errors, disk_errors,
        pages_checked, records_checked;
};

struct record {
    uint64_t magic, run, number, pages_written, clock_ns, filler[58], checksum;
};

static uint64_t *memory;
static uint64_t pages, cursor, generation, pages_written, memory_errors;
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;

static int disk = -1;
static uint64_t slots, disk_errors;
static volatile uint64_t number;
static uint64_t run_id;
static int sock;
static struct sockaddr_in observer;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}

static void sleep_ns(uint64_t ns)
{
    struct timespec t = { (time_t)(ns / 1000000000ULL), (long)(ns % 1000000000ULL) };
    nanosleep(&t, NULL);
}

static uint64_t setting(const char *name, uint64_t fallback)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : fallback;
}

static void fatal(const char *what)
{
    fprintf(stderr, "prover: %s: %s\n", what, strerror(errno));
    sync();
    exit(1);
}

/* --- memory ------------------------------------------------------------------------------- */

static uint64_t page_base(uint64_t page, uint64_t gen)
{
    uint64_t x = page * 0x9e3779b97f4a7c15ULL ^ (gen + 1) * 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 29;
    return x * 0x94d049bb133111ebULL;
}

static uint64_t word_at(uint64_t base, uint64_t k) { return base + k * 0xd6e8feb86659fd93ULL; }

/* Words on the stride change with each generation; all others keep their first value. So a write
 * costs only 64 words, but a full check finds a flipped bit anywhere in the page. */
static int page_is_whole(uint64_t page, uint64_t gen, int every_word)
{
    uint64_t *w = memory + page * WORDS, hot = page_base(page, gen), cold = page_base(page, 0);
    for (uint64_t k = 0; k < WORDS; k += every_word ? 1 : STRIDE)
        if (w[k] != word_at(k % STRIDE ? cold : hot, k))
            return 0;
    return 1;
}

static void page_write(uint64_t page, uint64_t gen)
{
    uint64_t *w = memory + page * WORDS, hot = page_base(page, gen);
    for (uint64_t k = 0; k < WORDS; k += STRIDE)
        w[k] = word_at(hot, k);
}

static uint64_t generation_of(uint64_t page) { return page < cursor ? generation : generation - 1; }

static void memory_fill(uint64_t mib)
{
    pages = mib * 256;
    if (!pages)
        return;
    memory = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fatal("no room for the memory region");
    for (uint64_t p = 0; p < pages; p++) {
        uint64_t base = page_base(p, 0);
        for (uint64_t k = 0; k < WORDS; k++)
            memory[p * WORDS + k] = word_at(base, k);
    }
    generation = 1;
}

static void memory_step(uint64_t count)
{
    pthread_mutex_lock(&memory_lock);
    while (count--) {
        if (!page_is_whole(cursor, generation_of(cursor), 0))
            memory_errors++;
        page_write(cursor, generation);
        pages_written++;
        if (++cursor == pages) {
            cursor = 0;
            generation++;
        }
    }
    pthread_mutex_unlock(&memory_lock);
}

static void *memory_main(void *unused)
{
    uint64_t rate = setting("VMC_DIRTY_KIB", 0) / 4, last = now_ns(), owed = 0;
    uint64_t pause = 1000000 * setting("VMC_PAUSE_MS", 10);
    (void)unused;
    while (pages && rate) {
        sleep_ns(pause);
        uint64_t at = now_ns(), passed = at - last;
        last = at;
        if (passed > 100000000)
            passed = 100000000; /* do not make up for time in which the guest could not run */
        owed += passed * rate;
        memory_step(owed / 1000000000ULL);
        owed %= 1000000000ULL;
    }
    return NULL;
}

static uint64_t memory_check(void)
{
    for (uint64_t first = 0; first < pages; first += 64) {
        pthread_mutex_lock(&memory_lock);
        for (uint64_t p = first; p < first + 64 && p < pages; p++)
            if (!page_is_whole(p, generation_of(p), 1))
                memory_errors++;
        pthread_mutex_unlock(&memory_lock);
    }
    return pages;
}

/* --- output ------------------------------------------------------------------------------- */

static void send_message(uint64_t kind, uint64_t token, uint64_t checked_pages,
                         uint64_t checked_records, const struct sockaddr_in *to)
{
    struct message m = { MESSAGE_MAGIC, kind, token, run_id, number, now_ns(),
                         pages_written, memory_errors, disk_errors, checked_pages,
                         checked_records };
    sendto(sock, &m, sizeof m, MSG_DONTWAIT, (const struct sockaddr *)to, sizeof *to);
}

/* --- disk --------------------------------------------------------------------------------- */

static uint64_t record_sum(const struct record *r)
{
    const uint64_t *w = (const uint64_t *)r;
    uint64_t sum = 0xcbf29ce484222325ULL;
    for (unsigned i = 0; i < SECTOR / 8 - 1; i++)
        sum = (sum ^ w[i]) * 0x100000001b3ULL;
    return sum;
}

static void record_write(struct record *r, uint64_t n)
{
    r->magic = RECORD_MAGIC;
    r->run = run_id;
    r->number = n;
    r->pages_written = pages_written;
    r->clock_ns = now_ns();
    for (unsigned i = 0; i < sizeof r->filler / 8; i++)
        r->filler[i] = word_at(n, i);
    r->checksum = record_sum(r);
    if (pwrite(disk, r, SECTOR, (off_t)((n - 1) % slots * SECTOR)) != SECTOR || fdatasync(disk))
        disk_errors++;
}

static void *disk_main(void *unused)
{
    struct record *r = aligned_alloc(PAGE, PAGE);
    uint64_t pause = 1000000000ULL / setting("VMC_RECORDS", 50);
    (void)unused;
    for (;;) {
        if (disk >= 0)
            record_write(r, number + 1);
        number++;
        send_message(NUMBER, 0, 0, 0, &observer);
        sleep_ns(pause);
    }
    return NULL;
}

static uint64_t disk_check(void)
{
    uint64_t newest = number, checked = 0;
    /* Once the ring is full, the writer overtakes a reader of the oldest records. */
    uint64_t oldest = newest > slots ? newest - slots + 1 + slots / 8 : 1;
    struct record *block = aligned_alloc(PAGE, BLOCK);
    if (disk < 0)
        return 0;
    for (uint64_t n = oldest; n <= newest;) {
        uint64_t slot = (n - 1) % slots, first = slot & ~127ULL;
        ssize_t got = pread(disk, block, BLOCK, (off_t)(first * SECTOR));
        for (; n <= newest && (n - 1) % slots < first + 128 && (n - 1) % slots >= first; n++) {
            struct record *r = block + ((n - 1) % slots - first);
            if ((ssize_t)(((n - 1) % slots - first + 1) * SECTOR) > got || r->number != n ||
                r->run != run_id || r->checksum != record_sum(r))
                disk_errors++;
            checked++;
        }
    }
    free(block);
    return checked;
}

static void disk_open(void)
{
    uint64_t bytes = 0;
    disk = open("/dev/vda", O_RDWR | O_DIRECT);
    if (disk < 0)
        return;
    if (ioctl(disk, BLKGETSIZE64, &bytes))
        fatal("size of /dev/vda");
    slots = bytes / BLOCK * 128;
}

/* --- answers ------------------------------------------------------------------------------ */

static volatile uint64_t verify_token;
static sem_t verify_asked;
static struct sockaddr_in verify_from;

static void *verify_main(void *unused)
{
    uint64_t done = 0, checked_pages = 0, checked_records = 0;
    (void)unused;
    for (;;) {
        sem_wait(&verify_asked);
        uint64_t token = verify_token;
        if (!token)
            continue;
        if (token != done) {
            checked_pages = memory_check();
            checked_records = disk_check();
            done = token;
        }
        send_message(VERIFIED, token, checked_pages, checked_records, &verify_from);
        if (verify_token == token)
            verify_token = 0;
    }
    return NULL;
}

static void answer_main(void)
{
    struct message m;
    for (;;) {
        struct sockaddr_in from;
        socklen_t size = sizeof from;
        ssize_t got = recvfrom(sock, &m, sizeof m, 0, (struct sockaddr *)&from, &size);
        if (got != sizeof m || m.magic != MESSAGE_MAGIC)
            continue;
        if (m.kind == PING)
            send_message(PONG, m.token, 0, 0, &from);
        if (m.kind == VERIFY) {
            verify_from = from;
            verify_token = m.token;
            sem_post(&verify_asked);
        }
    }
}

/* --- key-value store ---------------------------------------------------------------------- */

enum { STORE_PORT = 7003, CELLS = 64, SESSIONS = 64 };
enum { READ = 1, WRITE = 2, CAS = 3, ADD = 4 };
#define REQUEST_MAGIC 0x315145524b434d56ULL /* "VMCKREQ1" */
#define REPLY_MAGIC 0x315045524b434d56ULL /* "VMCKREP1" */

struct request {
    uint64_t magic, recording, session, sequence, kind, key, value, expected;
};

struct reply {
    uint64_t magic, recording, session, sequence, run, before;
};

/* A recording whose number is higher than all previous numbers begins with empty cells. Each request
 * of a session is carried out at most once, even if it arrives several times. */
static uint64_t recording, cell[CELLS];
static struct {
    uint64_t sequence, before;
} session[SESSIONS];
static int store_sock;

static uint64_t carry_out(const struct request *r)
{
    uint64_t *c = &cell[r->key], before = *c;
    if (r->kind == WRITE || (r->kind == CAS && before == r->expected))
        *c = r->value;
    if (r->kind == ADD)
        *c += r->value;
    return before;
}

static void *store_main(void *unused)
{
    struct request r;
    (void)unused;
    for (;;) {
        struct sockaddr_in from;
        socklen_t size = sizeof from;
        ssize_t got = recvfrom(store_sock, &r, sizeof r, 0, (struct sockaddr *)&from, &size);
        if (got != sizeof r || r.magic != REQUEST_MAGIC || r.key >= CELLS ||
            r.session >= SESSIONS || r.recording < recording)
            continue;
        if (r.recording > recording) {
            recording = r.recording;
            memset(cell, 0, sizeof cell);
            memset(session, 0, sizeof session);
        }
        if (r.sequence < session[r.session].sequence)
            continue;
        if (r.sequence > session[r.session].sequence) {
            session[r.session].before = carry_out(&r);
            session[r.session].sequence = r.sequence;
        }
        struct reply answer = { REPLY_MAGIC, recording, r.session, r.sequence, run_id,
                                session[r.session].before };
        sendto(store_sock, &answer, sizeof answer, MSG_DONTWAIT, (const struct sockaddr *)&from,
               size);
    }
    return NULL;
}

static void store_open(void)
{
    struct sockaddr_in here = { .sin_family = AF_INET, .sin_port = htons(STORE_PORT) };
    store_sock = socket(AF_INET, SOCK_DGRAM, 0);
    if (store_sock < 0 || bind(store_sock, (struct sockaddr *)&here, sizeof here))
        fatal("socket of the key-value store");
}

/* --- chat --------------------------------------------------------------------------------- */

enum { CHAT_PORT = 7002, MOST_PEERS = 8 };
#define CHAT_MAGIC 0x3154414843434d56ULL /* "VMCCHAT1" */

struct chat_message {
    uint64_t magic, from, run, number;
};

/* Fills one page. A number is recorded as sent before it is sent, and as received after it has
 * arrived. */
static volatile struct chat {
    uint64_t magic, inverse, run, self, peers, filler[3];
    struct {
        uint64_t sent, received, first, count;
    } peer[MOST_PEERS];
} *chat;
static int chat_sock;

static void *chat_send_main(void *unused)
{
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(CHAT_PORT) };
    struct in_addr first;
    uint64_t pause = 1000000000ULL / setting("VMC_CHAT_RATE", 100);
    (void)unused;
    if (!inet_aton(getenv("VMC_CHAT_FIRST") ? getenv("VMC_CHAT_FIRST") : "", &first))
        fatal("VMC_CHAT_FIRST");
    for (;;) {
        for (uint64_t i = 0; i < chat->peers; i++) {
            if (i == chat->self)
                continue;
            struct chat_message m = { CHAT_MAGIC, chat->self, run_id, ++chat->peer[i].sent };
            __sync_synchronize();
            to.sin_addr.s_addr = htonl(ntohl(first.s_addr) + (uint32_t)i);
            sendto(chat_sock, &m, sizeof m, 0, (const struct sockaddr *)&to, sizeof to);
        }
        sleep_ns(pause);
    }
    return NULL;
}

static void *chat_receive_main(void *unused)
{
    struct chat_message m;
    (void)unused;
    for (;;) {
        if (recv(chat_sock, &m, sizeof m, 0) != sizeof m || m.magic != CHAT_MAGIC ||
            m.from >= chat->peers)
            continue;
        if (!chat->peer[m.from].count++)
            chat->peer[m.from].first = m.number;
        if (m.number > chat->peer[m.from].received)
            chat->peer[m.from].received = m.number;
    }
    return NULL;
}

static void chat_open(void)
{
    struct sockaddr_in here = { .sin_family = AF_INET, .sin_port = htons(CHAT_PORT) };
    int room = 1 << 20;
    if (!setting("VMC_CHAT_PEERS", 0))
        return;
    chat = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (chat == MAP_FAILED)
        fatal("no room for the chat");
    chat->run = run_id;
    chat->self = setting("VMC_CHAT_SELF", 0);
    chat->peers = setting("VMC_CHAT_PEERS", 0);
    if (chat->peers > MOST_PEERS)
        fatal("VMC_CHAT_PEERS");
    chat_sock = socket(AF_INET, SOCK_DGRAM, 0);
    if (chat_sock < 0 || bind(chat_sock, (struct sockaddr *)&here, sizeof here) ||
        setsockopt(chat_sock, SOL_SOCKET, SO_RCVBUF, &room, sizeof room))
        fatal("chat socket");
    chat->inverse = ~CHAT_MAGIC;
    chat->magic = CHAT_MAGIC;
}

static void start(void *(*main)(void *), int priority)
{
    pthread_t thread;
    pthread_attr_t attr;
    struct sched_param p = { .sched_priority = priority };
    pthread_attr_init(&attr);
    if (priority) {
        pthread_attr_setinheritsched(&attr, PTHREAD_EXPLICIT_SCHED);
        pthread_attr_setschedpolicy(&attr, SCHED_FIFO);
        pthread_attr_setschedparam(&attr, &p);
    }
    if (pthread_create(&thread, &attr, main, NULL))
        fatal("no thread");
}

/* --- settings ----------------------------------------------------------------------------- */

/* QEMU's fw_cfg device: a 16-bit selector, then data byte by byte (QEMU docs/specs/fw_cfg). It holds
 * the guest's kernel command line, as passed to this QEMU process. If a guest was saved and is
 * restored by another QEMU process, fw_cfg holds the new command line, and /proc/cmdline still holds
 * the old one. */
enum { FW_CFG_SELECT = 0x510, FW_CFG_DATA = 0x511, CMDLINE_SIZE = 0x14, CMDLINE = 0x15 };
enum { LONGEST = 2048 };

static void command_line(char *text)
{
    uint32_t size = 0;
    outw(CMDLINE_SIZE, FW_CFG_SELECT);
    for (unsigned i = 0; i < 4; i++)
        size |= (uint32_t)inb(FW_CFG_DATA) << 8 * i;
    if (size >= LONGEST)
        size = LONGEST - 1;
    outw(CMDLINE, FW_CFG_SELECT);
    for (unsigned i = 0; i < size; i++)
        text[i] = (char)inb(FW_CFG_DATA);
    text[size] = 0;
}

/* Wait until this is no longer a template, and read the guest's own settings. */
static void await_settings(void)
{
    static char first[LONGEST], second[LONGEST];
    if (ioperm(FW_CFG_SELECT, 2, 1))
        fatal("ports of fw_cfg");
    printf("prover: waiting for settings\n");
    fflush(stdout);
    /* Require two equal readings, since the state may have been saved in the middle of a reading. */
    for (;; sleep_ns(5000000)) {
        command_line(first);
        command_line(second);
        if (!strcmp(first, second) && !strstr(first, "VMC_TEMPLATE"))
            break;
    }
    for (char *word = strtok(first, " "); word; word = strtok(NULL, " "))
        if (!strncmp(word, "VMC_", 4) && putenv(word))
            fatal("setting");
}

int main(void)
{
    struct sockaddr_in here = { .sin_family = AF_INET, .sin_port = htons(7001) };
    struct sched_param first = { .sched_priority = 20 };
    memory_fill(setting("VMC_MEMORY_MIB", 0));
    if (setting("VMC_TEMPLATE", 0))
        await_settings();
    if (system("/network"))
        fatal("network");
    /* Do not wait until the kernel has collected entropy, which takes a second. The host provides a
     * seed, since guests from one template would otherwise draw the same numbers. */
    if (getrandom(&run_id, sizeof run_id, GRND_INSECURE) != sizeof run_id)
        fatal("no random number");
    run_id ^= setting("VMC_SEED", 0);
    disk_open();
    sock = socket(AF_INET, SOCK_DGRAM, 0);
    if (sock < 0 || bind(sock, (struct sockaddr *)&here, sizeof here))
        fatal("socket");
    observer.sin_family = AF_INET;
    observer.sin_port = htons(7000);
    if (!inet_aton(getenv("VMC_OBSERVER") ? getenv("VMC_OBSERVER") : "", &observer.sin_addr))
        fatal("VMC_OBSERVER");
    printf("prover: %llu pages, %llu slots, run %016llx\n", (unsigned long long)pages,
           (unsigned long long)slots, (unsigned long long)run_id);
    fflush(stdout);
    start(disk_main, 10);
    start(memory_main, 0);
    sem_init(&verify_asked, 0, 0);
    start(verify_main, 0);
    store_open();
    start(store_main, 13);
    chat_open();
    if (chat) {
        start(chat_receive_main, 12);
        start(chat_send_main, 11);
    }
    sched_setscheduler(0, SCHED_FIFO, &first);
    answer_main();
    return 0;
}
