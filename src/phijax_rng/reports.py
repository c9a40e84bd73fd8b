def as_text(d):
    out=[f"clean: {d['clean']}"]
    for f in d['findings']:
        out.append(f"{f['rank']}: [{f['kind']}] {f['text']}"); out+= ["   derived "+x for x in f['derivations']]; out+=["   used    "+x for x in f['uses']]
    for u in d['unseen']: out.append(f"not seen: {u}")
    for x in d['draws']: out.append(f"  {x['keys'][:3]} {x['primitive']} {x['shape']} {x['dtype']} {x['place']} x{x['count']}")
    return "\n".join(out)
